"""Room 2, features: backbones, heads, and foreign weights."""
