"""How the draft learns: rolling buffer, losses on truncated rows, updates, schedule.

In the data's order: `buffer.append`, `buffer.sample`, `losses.distillation_loss`,
`update.update`; `schedule` decides on the host when an update is due.
"""
