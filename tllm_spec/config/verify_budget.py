"""What requests that share a round's rows cannot be combined with."""


def budget_problem(named: str, *, drafts_trees: bool, use_rejection_sampling: bool) -> str | None:
    """What is wrong with an option that lets requests share a round's rows, which is `named`; None:
    nothing."""
    if drafts_trees:
        return f"{named} needs chains: the drafts of a tree have rows of their own"
    if use_rejection_sampling:
        return (
            f"{named} and use_rejection_sampling = True are exclusive: drafts that are chosen by "
            "their probability would change the distribution of the text"
        )
    return None
