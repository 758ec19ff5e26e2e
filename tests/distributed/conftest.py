"""Cases in ranks/ and tensorflow_ranks/ run on real ranks; pytest's own run skips them."""

collect_ignore = ["ranks", "tensorflow_ranks", "mixed"]
