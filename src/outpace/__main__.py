"""`python -m outpace`, and the script `outpace`."""

import sys


def main() -> None:
    """Run the command; Ctrl-C while it is still being imported is one line, too."""
    try:
        from outpace.cli import main as command

        command()
    except KeyboardInterrupt:
        print("outpace: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
