//! kTLS is asked for, and its absence said.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

use hotlift_tls::probe_kernel_tls;

use crate::support::line;

#[test]
fn a_socket_that_the_kernel_cannot_do_is_refused_in_words() {
    let (socket, _other) = UnixStream::pair().unwrap();
    let error = probe_kernel_tls(&socket).unwrap_err();
    assert!(
        line(&error).starts_with("the kernel does no TLS on this socket: "),
        "{}",
        line(&error)
    );
}

#[test]
fn a_tcp_socket_works_as_before_whatever_the_kernel_says() {
    use std::io::{Read, Write};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    if let Err(error) = probe_kernel_tls(&client) {
        println!("{}", line(&error));
    }
    client.write_all(b"plain").unwrap();
    let mut got = [0; 5];
    server.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"plain");
}
