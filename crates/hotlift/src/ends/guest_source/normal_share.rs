//! `multifd-normal-page-ratio`: the share of zero pages that are sent with their content.

/// Selects the zero pages of one thread that are sent with content. They are evenly spread, not random: the same guest always
/// gives the same count.
#[derive(Debug)]
pub(crate) struct NormalShare {
    percent: u8,
    /// Accumulated percentage. When it reaches 100, a zero page is sent with content.
    due: u8,
}

impl NormalShare {
    /// Creates the selection; `percent` is 0 to 100.
    pub(crate) fn new(percent: u8) -> Self {
        Self { percent, due: 0 }
    }

    /// Returns true if the zero page just found must be sent with its content.
    pub(crate) fn takes(&mut self) -> bool {
        self.due += self.percent;
        let takes = self.due >= 100;
        if takes {
            self.due -= 100;
        }
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_exact_to_the_page_for_any_number_of_pages() {
        for percent in 0..=100 {
            let mut share = NormalShare::new(percent);
            let mut taken = 0;
            for pages in 1..=500_u32 {
                taken += u32::from(share.takes());
                assert_eq!(taken, pages * u32::from(percent) / 100, "{percent} %");
            }
        }
    }
}
