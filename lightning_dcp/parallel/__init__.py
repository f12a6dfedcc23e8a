"""Groups of ranks, how a pack lies on them, and the collectives between them."""
