"""Moving experts between memory tiers: stores, transfers, slots and their policies."""
