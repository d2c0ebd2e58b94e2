"""One model over several processes: rank 0 serves and schedules, all ranks run the same steps.

Owns how ranks find each other, how a step's layout reaches them, how weights are cut, and how a
lost rank is noticed. Knows modules and layouts; nothing of checkpoints or scheduling.
"""
