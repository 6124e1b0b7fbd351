"""EM-TDAMP: learning by message passing, with group sparsity (Xu, Liu, Zhang & Lau 2024)."""
