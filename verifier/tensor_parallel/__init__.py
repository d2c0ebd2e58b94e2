"""One model over several processes: rank 0 serves and schedules, all ranks run the same steps."""
