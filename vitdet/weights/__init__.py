"""Foreign state dicts to ours: literal rules, strict loading, a report of what did not fit."""
