"""The file that toy tasks find beside their program; shipped as text, never run here."""
