"""The processes of `tandem up`: which there are, what keeps them running, what a terminal shows."""
