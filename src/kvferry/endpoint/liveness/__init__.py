"""Life of processes: how it is shown, asked after, and how its end is proven."""
