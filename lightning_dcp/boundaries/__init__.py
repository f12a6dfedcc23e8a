"""Where packs are cut: budgets of shards, layouts that keep them, and audits."""
