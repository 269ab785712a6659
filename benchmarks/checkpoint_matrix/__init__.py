"""From every strategy and number of ranks to every other: does training go on exactly?"""
