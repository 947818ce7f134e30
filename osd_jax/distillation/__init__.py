"""Learning: trains the draft on the requests that it serves.

In the order of the data: `buffer.append`, `buffer.sample`, `losses.distillation_loss`,
`update.update`. `schedule` decides on the host when an update is due, and `learner`
ties them together.
"""
