"""Where pages, bytes and requests meet: arena, prefix cache, tiers, accounting."""
