"""Native CPU kernels: attention straight over sealed and open pages, and their encoding."""
