"""Programs that run in other systems' environments. They import nothing of Penstock but the engine."""
