"""What travels in a push: messages, pieces and buckets, tensors as bytes."""
