"""Plans in the training loops of other libraries: Hugging Face's Trainer, and Lightning."""
