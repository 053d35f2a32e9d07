"""One file for each job: its ways (ours and the peers'), its sizes, and its bars."""

# in the order of a whole run; `moments` is for a GPU, `startup`, `profile` and `attention` for the host
CPU = ("spectral", "average_cosine", "two_nn", "semi_nmf", "all_metrics", "startup", "growth", "profile", "monitor",
       "attention", "every_step", "run_growth", "scaling")  # fmt: skip
CUDA = ("two_nn", "moments", "spectral", "average_cosine", "semi_nmf", "all_metrics", "profile", "profile_command",
        "monitor", "every_step", "training")  # fmt: skip
