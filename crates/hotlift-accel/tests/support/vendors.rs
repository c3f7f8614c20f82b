//! Opens the vendors' own libraries, from the directory that `scripts/accelerator-libraries` prints.
//!
//! libqpl requires a newer C library than Debian 12 has. Its tests therefore run again under the dynamic loader of that
//! directory.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::Command;

use hotlift_mem::PAGE_SIZE;
use libloading::Library;

/// Variable that names the directory.
pub const VARIABLE: &str = "HOTLIFT_VENDOR_LIBRARIES";
/// Set in a process that the directory's loader has started.
const INSIDE: &str = "HOTLIFT_VENDOR_LOADER";

/// Returns true in a process that finds the libraries by their sonames.
pub fn inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Returns a command for this program under the directory's loader; `None` without a directory.
pub fn this_program() -> Option<Command> {
    let folder = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty())?;
    let mut path = folder.clone();
    // ISA-L and the compiler's runtime.
    path.push(":/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu");
    let mut command = Command::new(PathBuf::from(folder).join("ld-linux-x86-64.so.2"));
    command
        .arg("--library-path")
        .arg(path)
        .arg(std::env::current_exe().expect("the program's own file"))
        .env(INSIDE, "1")
        .env_remove("HOTLIFT_LIBQPL")
        .env_remove("HOTLIFT_LIBQATZIP");
    Some(command)
}

/// A job of libqpl's software, page after page, without our code.
pub struct Qpl {
    _library: Library,
    execute: unsafe extern "C" fn(*mut u8) -> u32,
    job: Vec<u64>,
    flags: u32,
}

// SAFETY: the job is exclusive to this value.
unsafe impl Send for Qpl {}

impl Qpl {
    /// First, last, no verification: QEMU's flags.
    pub const FIXED: u32 = 0x1 | 0x2 | 0x4000;
    /// Huffman codes per page.
    pub const DYNAMIC: u32 = Self::FIXED | 0x2000;

    /// Returns a job that compresses with those flags.
    pub fn new(flags: u32) -> Self {
        const SOFTWARE: u32 = 2;
        // SAFETY: the library's constructors are sound; the types are those of its header.
        let (library, size, init, execute) = unsafe {
            let library = Library::new("libqpl.so.1").expect("libqpl");
            let size = *library
                .get::<unsafe extern "C" fn(u32, *mut u32) -> u32>(b"qpl_get_job_size\0")
                .expect("qpl_get_job_size");
            let init = *library
                .get::<unsafe extern "C" fn(u32, *mut u8) -> u32>(b"qpl_init_job\0")
                .expect("qpl_init_job");
            let execute = *library
                .get::<unsafe extern "C" fn(*mut u8) -> u32>(b"qpl_execute_job\0")
                .expect("qpl_execute_job");
            (library, size, init, execute)
        };
        let mut bytes = 0;
        // SAFETY: room for the size.
        assert_eq!(unsafe { size(SOFTWARE, &raw mut bytes) }, 0);
        let mut job = vec![0_u64; usize::try_from(bytes).expect("64 bits").div_ceil(8)];
        // SAFETY: zeroed memory of the required size.
        assert_eq!(unsafe { init(SOFTWARE, job.as_mut_ptr().cast()) }, 0);
        Self {
            _library: library,
            execute,
            job,
            flags,
        }
    }

    /// Compresses a page to the start of `out`, if it fits into one byte less than a page.
    pub fn compress(&mut self, page: &[u8], out: &mut [u8]) -> Option<usize> {
        match self.run(1, self.flags, page, &mut out[..PAGE_SIZE - 1]) {
            (0, written) => Some(written),
            // More output needed.
            (2, _) => None,
            (status, _) => panic!("libqpl: status {status}"),
        }
    }

    /// Decompresses a stream to a page.
    pub fn decompress(&mut self, stream: &[u8], page: &mut [u8]) {
        let done = self.run(0, 0x1 | 0x2, stream, page);
        assert_eq!(done, (0, PAGE_SIZE), "libqpl does not read what it wrote");
    }

    /// Runs a job; returns the status, and the bytes of output.
    fn run(&mut self, op: u32, flags: u32, input: &[u8], output: &mut [u8]) -> (u32, usize) {
        let job: *mut u8 = self.job.as_mut_ptr().cast();
        let length = |bytes: usize| u32::try_from(bytes).expect("a page");
        // SAFETY: offsets of the header, inside of the job; input and output live through the call.
        let (status, written) = unsafe {
            job.cast::<*const u8>().write(input.as_ptr());
            job.add(8).cast::<u32>().write(length(input.len()));
            job.add(16).cast::<*mut u8>().write(output.as_mut_ptr());
            job.add(24).cast::<u32>().write(length(output.len()));
            job.add(32).cast::<u32>().write(op);
            job.add(36).cast::<u32>().write(flags);
            job.add(52).cast::<u32>().write(1);
            job.add(64).cast::<*mut u8>().write(std::ptr::null_mut());
            let status = (self.execute)(job);
            (status, job.add(28).cast::<u32>().read())
        };
        (status, usize::try_from(written).expect("64 bits"))
    }
}
