"""The main job on real input: train a small packed, checkpointed LoRA model with and without glue."""
