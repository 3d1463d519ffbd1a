"""Several processes that run one model: transport, servers, scheduler, supervisor."""
