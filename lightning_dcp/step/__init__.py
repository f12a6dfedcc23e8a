"""One batch: cut into packs, run, and put back together."""
