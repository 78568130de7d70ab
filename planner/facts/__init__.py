"""Facts as data: shapes of models and figures of devices, each with its source."""
