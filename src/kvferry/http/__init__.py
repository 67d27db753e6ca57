"""What all of kvferry's HTTP servers share: limits on connections, request ids, error documents."""
