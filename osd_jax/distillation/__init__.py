"""How the draft learns from the requests it serves.

In the order of the data: `buffer.append`, `buffer.sample`, `losses.distillation_loss`,
`update.update`. `schedule` decides on the host when an update is due, and `learner`
ties them together.
"""
