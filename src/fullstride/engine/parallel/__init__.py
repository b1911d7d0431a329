"""How a model is laid over ranks: one file for each way."""
