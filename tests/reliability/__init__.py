"""What is promised of answers when nodes fail, shown over real servers."""
