"""What a trained model does: text that goes on from a prompt."""
