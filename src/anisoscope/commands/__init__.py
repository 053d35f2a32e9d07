"""One file per verb: options, a run, its verdicts, its page."""
