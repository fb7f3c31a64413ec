"""The web page of `sosampler ui`: drop videos, see which frames are chosen and why, take them along.

`choices` what can be set · `look` a video becomes what the page shows · `videos` what was uploaded · `downloads` ·
`service` the page's questions and answers · `server` HTTP around it. The page itself lies in `static`. Everything is
the package's own and the standard library's: nothing is fetched from elsewhere, nothing is sent anywhere.
"""
