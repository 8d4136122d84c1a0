"""What is known of the model families of transformers."""
