"""The programs that run inside grading sandboxes; shipped as text. Only the codec is ever loaded outside."""

__all__: list[str] = []
