"""What crosses a process: requests, tokens, hand-offs, and the one error tree."""
