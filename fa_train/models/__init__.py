"""Plain nn.Modules over packed token streams."""
