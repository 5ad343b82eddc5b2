"""What single parts of gpipe_fast cost."""
