"""The dashboard: a page that shows the cache live, and the JSON routes that it reads."""
