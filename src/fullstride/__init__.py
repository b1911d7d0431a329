"""Plan, run, measure, explain and tune distributed training of large language models, with your model unchanged."""

__version__ = "0.1.0"
