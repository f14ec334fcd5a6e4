"""What tests of plugins share."""
