"""The clients of a drafter, for engines that verify drafts by themselves; see `tandem.client`."""
