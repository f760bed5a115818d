"""What bench.py is made of. It may use flash.py, which does not know it."""
