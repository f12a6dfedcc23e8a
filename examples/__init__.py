"""Losses as ordinary LightningModules, each file a script, and a comparison of static and dynamic context parallelism."""
