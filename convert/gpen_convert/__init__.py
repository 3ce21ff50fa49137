"""Legacy files in, self-describing files out. The runtime never imports this package."""
