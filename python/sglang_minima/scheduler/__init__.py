"""The scheduler process: requests, queue policy, batch forming, the loop."""
