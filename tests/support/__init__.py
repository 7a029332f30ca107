"""What several test files share: reference arithmetic, tiny models, small indices."""
