"""What is kept in memory and what is made again: one file for each way."""
