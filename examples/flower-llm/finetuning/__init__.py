"""fedsift on Flower: fine-tune a language model with LoRA."""
