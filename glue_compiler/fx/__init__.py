"""Graph toolkit: what passes ask of an FX graph. Nothing here knows a rewrite."""
