"""Tools at the edge of `osd_jax`: nothing that serves or learns imports them.

`ahead_of_time` compiles a run for a machine that is not available (`osd compile`),
`pretrain` trains small models from scratch (`osd pretrain`), and `sizes` holds the
shapes of published models.
"""
