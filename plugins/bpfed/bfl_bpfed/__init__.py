"""BPFed: shared and personalised uncertainty (Chen, Liu, Cao & Zhang 2023)."""
