"""What kvjax shows of itself."""
